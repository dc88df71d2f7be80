"""What models have learned: attention maps, calibration, predictors behind one interface and their likelihood."""
