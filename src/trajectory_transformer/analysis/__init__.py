"""What a trained model has learned: attention maps, calibration of forecasts, loss on other data."""
