"""The model over tokens."""
