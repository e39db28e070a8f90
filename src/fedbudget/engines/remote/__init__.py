"""Parts that every engine with nodes on other machines shares, for any transport."""
