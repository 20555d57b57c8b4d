"""The demonstration: a small transformer, trained on real text, healthy and with two faults."""
