"""The paper's datasets as they are published: what is known of their files, where they are found, how to get them."""
