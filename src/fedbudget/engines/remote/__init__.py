"""What any fleet on other machines needs, whatever carries its messages."""
