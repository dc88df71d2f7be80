"""The GPU wing: the same computations as the core, fast; it plugs in through `Decoder` and `Engine`."""
