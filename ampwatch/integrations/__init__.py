"""Frameworks that build the scaler themselves: a module for each, imported on use only (docs/integrations.md)."""
