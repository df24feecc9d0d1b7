"""Pictures and reference pages of a declared machine, all from one intermediate model."""
