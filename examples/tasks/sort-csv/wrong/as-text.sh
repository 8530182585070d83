head -n 1 lakes.csv > sorted.csv
tail -n +2 lakes.csv | sort -t , -k 3 -r >> sorted.csv
