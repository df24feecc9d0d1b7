"""Several ranks of one actor that act as one."""
