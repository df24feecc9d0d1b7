"""``lifecycle doctor``: what this machine can do, and what to install or set so that it does it well.

Checks are small functions from what they look at (installed packages, the environment, a file tree, torch) to findings;
``examine`` gathers them all, ``speed`` measures, and ``command`` shows both. Nothing is changed, and every package that
may be missing is imported where it is used: a machine without torch is told so.
"""
