"""What hotswap is tested with, for whoever writes an engine, a store or a policy of their own."""
