# Succeeds when count.txt holds the number of lines that are not empty.
test "$(tr -d ' \n' < count.txt)" = 4
