"""Floor 8: the command line. Answers go to standard output, everything else to standard error."""
