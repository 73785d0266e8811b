"""The command line of a fit: YAML files, and the help of a strategy."""
