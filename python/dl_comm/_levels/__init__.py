"""Groups that are made by collectives: splits, grids, communicators, the selector."""
