"""Configuration: frozen data, the flags and files it is read from, and the rules it must keep."""
