"""What models know: predictors behind one interface, and the likelihood of what happened under their predictions."""
