"""What is measured, and what it is measured against. `make bench` runs all of it."""
