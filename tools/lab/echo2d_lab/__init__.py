"""Programs that measure or imitate echo2d, in no wheel: benches, fault simulator, stand-ins, research scripts."""
