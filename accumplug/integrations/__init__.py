"""One file for each framework, imported only where it is used."""
