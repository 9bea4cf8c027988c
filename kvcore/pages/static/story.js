// What evictions cost.
