# Succeeds when sorted.csv is what is expected, whatever the line ends.
tr -d '\r' < sorted.csv | cmp - "$(dirname "$0")/expected.csv"
