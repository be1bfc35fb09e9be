"""What router and engine truly share."""
