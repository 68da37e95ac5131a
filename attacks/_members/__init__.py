"""Membership scores."""
