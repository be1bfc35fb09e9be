"""A model split over ranks: what each rank holds, and where they add up."""
