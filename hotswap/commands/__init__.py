"""What the command line does apart from reading words and printing: one module for each larger command."""
