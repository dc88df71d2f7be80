"""GPU implementations of the `Decoder` and `Engine` interfaces. They compute the same results as the core, faster."""
