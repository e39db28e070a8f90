"""The web page of runs, live, and the same as one file to keep: both read what runs write, and change nothing."""
