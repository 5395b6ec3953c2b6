"""The prefix cache as a radix tree over tokens: sequences that start alike share the pages of what they share.

A node is a run of whole pages. Children are found by their first page's tokens, and the rest of the run is compared token by token
(as bytes of int32: one call per node however long the run); no hash stands for a token anywhere. Where two sequences part inside a
page, that page is not shared. A node is split where a match or an insert ends, so a node is always used, locked and timed as a whole,
and only eviction shortens one.

Logical time is a position in `_lru`, which holds the unlocked nodes, least recently used first. A use moves its path to the end, the
deepest node first. Hence a child always stands before its parent, and since a locked node's ancestors are locked as well, the first
node of all is an unlocked leaf: eviction finds it in O(1), whatever the size of the tree. Locking takes a node out, the last unlock
puts it in again at the end.

The method is that of RadixAttention (Zheng et al., "SGLang", arXiv:2312.07104). `make_prefix_cache("radix", ...)` makes it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from minisgl.core import Int32Array
from minisgl.errors import IntegrityError
from minisgl.kvcache.base import BasePrefixCache, InsertResult, PrefixHandle, no_pages

__all__ = ["RadixPrefixCache"]

TOKEN_BYTES = 4

EdgeKey = tuple[str | None, bytes]
"""A salt and the tokens of one page, as bytes: what a child is found by."""


@dataclass(slots=True, eq=False)
class _Node:
    """A run of pages below `parent`. `parent` is None for the root and for a node that was evicted."""

    parent: _Node | None
    key: EdgeKey
    run: bytes
    """Its tokens as int32: whole pages, at least one in all but the root."""
    pages: Int32Array
    """[number of pages in `run`]"""
    end: int
    """Tokens from the root to this node's last token."""
    num_locks: int = 0
    children: dict[EdgeKey, _Node] = field(default_factory=dict)


class RadixPrefixCache(BasePrefixCache):
    """Shares prefixes. Costs: match and insert O(tokens) in numpy plus O(nodes on the path), evict O(nodes it removes)."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._page_bytes = page_size * TOKEN_BYTES
        self._root = _Node(None, (None, b""), b"", no_pages(), 0)
        self._lru: OrderedDict[_Node, None] = OrderedDict()
        self._num_evictable_pages = 0
        self._num_locked_pages = 0

    @property
    def num_evictable_pages(self) -> int:
        return self._num_evictable_pages

    @property
    def num_locked_pages(self) -> int:
        return self._num_locked_pages

    def match(self, tokens: Int32Array, salt: str | None = None) -> PrefixHandle:
        return self._use(self._walk(_as_bytes(tokens), salt))

    def lock(self, handle: PrefixHandle) -> None:
        for node in self._path(handle.node, handle.num_tokens):
            if node.num_locks == 0:
                del self._lru[node]
                self._num_evictable_pages -= len(node.pages)
                self._num_locked_pages += len(node.pages)
            node.num_locks += 1
        handle.num_locks += 1

    def unlock(self, handle: PrefixHandle) -> None:
        path = self._path(handle.node, handle.num_tokens)
        handle.count_unlock()
        for node in path:
            node.num_locks -= 1
            if node.num_locks == 0:
                self._lru[node] = None
                self._num_evictable_pages += len(node.pages)
                self._num_locked_pages -= len(node.pages)

    def insert(self, tokens: Int32Array, pages: Int32Array, salt: str | None = None) -> InsertResult:
        self.check_shapes(tokens, pages)
        run = _as_bytes(tokens)
        node = self._walk(run, salt)
        num_existing = node.end
        num_existing_pages = num_existing // self.page_size
        if num_existing < len(tokens):
            own_run, own_pages = run[num_existing_pages * self._page_bytes :], np.array(pages[num_existing_pages:], dtype=np.int32)
            leaf = _Node(node, self._edge_key(own_run, 0, salt), own_run, own_pages, len(tokens))
            node.children[leaf.key] = node = leaf
            self._num_evictable_pages += len(own_pages)
        handle = self._use(node)
        offered = pages[:num_existing_pages]
        return InsertResult(handle, num_existing, offered[offered != handle.pages[:num_existing_pages]])

    def evict(self, num_pages: int) -> Int32Array:
        if num_pages < 0:
            raise IntegrityError(f"eviction of {num_pages} pages; at least 0 is allowed")
        num_missing = min(num_pages, self._num_evictable_pages)
        self._num_evictable_pages -= num_missing
        evicted = [no_pages()]
        while num_missing > 0:
            leaf = next(iter(self._lru))
            num_kept = max(0, len(leaf.pages) - num_missing)
            evicted.append(leaf.pages[num_kept:])
            num_missing -= len(evicted[-1])
            self._shorten(leaf, num_kept)
        return np.concatenate(evicted)

    def check_integrity(self) -> Int32Array:
        nodes = self._all_nodes()
        for node in nodes:
            self._check_node(node)
        self._check_order(nodes)
        counted = [sum(len(node.pages) for node in nodes if (node.num_locks > 0) is locked) for locked in (False, True)]
        known = [self._num_evictable_pages, self._num_locked_pages]
        if counted != known:
            raise IntegrityError(f"[evictable, locked] pages are {known} by the counters, {counted} in the tree")
        pages = np.concatenate([no_pages(), *(node.pages for node in nodes)])
        values, counts = np.unique(pages, return_counts=True)
        if len(values) < len(pages) or (len(pages) and values[0] < 0):
            raise IntegrityError(f"pages in the tree twice: {values[counts > 1].tolist()}; below 0: {values[values < 0].tolist()}")
        return pages

    def _edge_key(self, run: bytes, start: int, salt: str | None) -> EdgeKey:
        return salt, run[start : start + self._page_bytes]

    def _walk(self, run: bytes, salt: str | None) -> _Node:
        """The node at which the longest cached prefix of the tokens in `run` ends; it is split there if need be."""
        node, start = self._root, 0
        while (child := node.children.get(self._edge_key(run, start, salt))) is not None:  # less than a page is nobody's key
            if not run.startswith(child.run, start):
                return self._split(child, self._num_common_pages(child.run, run[start : start + len(child.run)]))
            node, start = child, start + len(child.run)
        return node

    def _num_common_pages(self, run: bytes, other: bytes) -> int:
        """Whole pages in which two runs start alike; they are not alike throughout `run`."""
        num_tokens = min(len(run), len(other)) // TOKEN_BYTES
        differ = np.frombuffer(run, np.int32, num_tokens) != np.frombuffer(other, np.int32, num_tokens)
        if differ.any():
            num_tokens = int(differ.argmax())
        return num_tokens // self.page_size

    def _split(self, node: _Node, num_pages: int) -> _Node:
        """Cut `node` after `num_pages`; returns the new upper part, whose use must follow.

        The lower part stays the same object, since handles that name it mean the whole path. Each of its locks is one on the upper
        part too.
        """
        parent = _parent(node)
        cut = num_pages * self._page_bytes
        end = node.end - (len(node.pages) - num_pages) * self.page_size
        upper = _Node(parent, node.key, node.run[:cut], node.pages[:num_pages].copy(), end, node.num_locks)
        parent.children[node.key] = upper
        node.run, node.pages = node.run[cut:], node.pages[num_pages:].copy()
        node.key = self._edge_key(node.run, 0, node.key[0])
        node.parent = upper
        upper.children[node.key] = node
        return upper

    def _path(self, node: _Node, num_tokens: int) -> list[_Node]:
        """The nodes from `node` up to the root, without the root. Raises IntegrityError unless they hold `num_tokens` tokens."""
        path: list[_Node] = []
        current: _Node | None = node if node.end == num_tokens else None
        while current is not self._root:
            if current is None:
                raise IntegrityError(f"a prefix of {num_tokens} tokens is no longer in this cache; lock it before anything is evicted")
            path.append(current)
            current = current.parent
        return path

    def _use(self, node: _Node) -> PrefixHandle:
        """Make the path down to `node` the most recently used and describe it."""
        path = self._path(node, node.end)
        for used in path:
            if used.num_locks == 0:
                self._lru[used] = None
                self._lru.move_to_end(used)
        pages = np.concatenate([no_pages(), *(used.pages for used in reversed(path))])
        return PrefixHandle(node.end, pages, node)

    def _shorten(self, leaf: _Node, num_pages: int) -> None:
        """Keep the leaf's first `num_pages`; without any it leaves the tree."""
        leaf.end -= (len(leaf.pages) - num_pages) * self.page_size
        leaf.run, leaf.pages = leaf.run[: num_pages * self._page_bytes], leaf.pages[:num_pages].copy()
        if num_pages == 0:
            del self._lru[leaf]
            del _parent(leaf).children[leaf.key]
            leaf.parent = None

    def _all_nodes(self) -> list[_Node]:
        """Every node but the root, each after its parent."""
        nodes = [self._root]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes[1:]

    def _check_node(self, node: _Node) -> None:
        parent = _parent(node)
        key = self._edge_key(node.run, 0, node.key[0])
        wrong = {
            "it is empty": len(node.pages) == 0,
            "its tokens do not fill its pages": len(node.run) != len(node.pages) * self._page_bytes,
            "its key is not its first page": node.key != key,
            "its parent does not know it by its first page": parent.children.get(key) is not node,
            "its salt is not its parent's": parent is not self._root and parent.key[0] != node.key[0],
            "its end is not where its tokens end": node.end != parent.end + len(node.pages) * self.page_size,
            "its locks are fewer than its children's": node.num_locks < sum([child.num_locks for child in node.children.values()]),
            "it is evictable if locked, or not if unlocked": (node.num_locks == 0) is not (node in self._lru),
        }
        if True in wrong.values():
            found = "; ".join([what for what, is_wrong in wrong.items() if is_wrong])
            raise IntegrityError(f"a node of {len(node.pages)} pages and {node.num_locks} locks ends at token {node.end}: {found}")

    def _check_order(self, nodes: list[_Node]) -> None:
        """Everything evictable is in the tree, and before its parent if that is evictable too."""
        num_unlocked = sum(node.num_locks == 0 for node in nodes)
        if len(self._lru) != num_unlocked:
            raise IntegrityError(f"{len(self._lru)} nodes are listed as evictable, {num_unlocked} in the tree are")
        listed: set[_Node] = set()
        for node in self._lru:
            if node.parent in listed:
                raise IntegrityError(f"the node ending at token {node.end} would be evicted after its parent")
            listed.add(node)


def _parent(node: _Node) -> _Node:
    """The parent of a node that is in the tree and not the root."""
    if node.parent is None:
        raise IntegrityError(f"a node ending at token {node.end} has no parent")
    return node.parent


def _as_bytes(tokens: Int32Array) -> bytes:
    return np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
