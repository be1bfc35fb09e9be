"""A model split over ranks: each rank's part, and the sums over ranks."""
