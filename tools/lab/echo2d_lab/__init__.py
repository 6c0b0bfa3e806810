"""Programs that measure or imitate echo2d, and are in no wheel: benches, fault simulator, stand-ins, research scripts."""
