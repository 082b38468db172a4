"""Does a look matter? Keys are cut from rows of heads, and what the answer loses is compared with other keys."""
