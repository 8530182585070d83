sort -t , -k 3 -n -r lakes.csv > sorted.csv
