"""The most hits that any cache can have, by trying every one."""


def most_hits(prompts, ratio, pool, *, bypass):
    """Return the most possible hits, by trying every content of the pool after each request.

    A block is the text from the prompt's start to its end. A content is a set of blocks with
    all blocks before them.
    """
    texts = ["".join(letter * ratio for letter in prompt) for prompt in prompts]
    best = {frozenset(): 0}
    for text in texts:
        path = frozenset(text[: end + 1] for end in range(min(len(text), pool)))
        after = {}
        for content, hits in best.items():
            total = hits + len(path & content)
            for kept in contents(path | content, pool):
                if bypass or path <= kept:
                    after[kept] = max(total, after.get(kept, 0))
        best = after
    return max(best.values())


def contents(blocks, pool):
    """Return every set of at most `pool` of `blocks` with all blocks before each of them."""
    found = {frozenset()}
    for block in sorted(blocks, key=len):
        found |= {
            content | {block}
            for content in found
            if len(content) < pool and (len(block) == 1 or block[:-1] in content)
        }
    return found
