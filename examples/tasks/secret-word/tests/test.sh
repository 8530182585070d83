# Succeeds when found.txt holds the word and no other.
test "$(tr -d ' \n' < found.txt)" = heron
