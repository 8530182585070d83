# Succeeds when answer.txt, what the harness printed, says no, and does not say yes as well.
grep -qiw 'no' answer.txt && ! grep -qiw 'yes' answer.txt
