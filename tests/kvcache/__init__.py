"""Prefix caches and the page allocator: host bookkeeping only, no model."""
