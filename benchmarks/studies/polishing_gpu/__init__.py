"""The gains of Final Polishing, way by way."""
