"""The live web page of runs, and the same page as one file; both only read run folders."""
