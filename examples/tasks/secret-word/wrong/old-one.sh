echo walnut > found.txt
