"""Settings of the whole suite: hypothesis without wall-clock deadlines (machines are shared), its seed printed."""

from hypothesis import HealthCheck, settings

settings.register_profile("echo2d", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("echo2d")
