"""`python -m fedbudget`."""

from fedbudget.cli.main import main

main()
