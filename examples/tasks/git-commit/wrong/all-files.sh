git init -q
git add .
git -c user.name=Ada -c user.email=ada@example.com commit -q -m 'Add the recipe'
