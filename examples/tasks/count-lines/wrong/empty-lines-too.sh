wc -l < poem.txt > count.txt
