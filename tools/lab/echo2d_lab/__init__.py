"""What measures and imitates echo2d, and is in no wheel: benches, fault simulator, stand-ins, research scripts."""
