"""What launcher and ranks share."""
