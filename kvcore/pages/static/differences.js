// Where the evictions of two traces differ, and what each cache has that the other lacks.
