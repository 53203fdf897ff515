"""What is asked: the YAML of an experiment, its runs, and the choices and identities in them."""
