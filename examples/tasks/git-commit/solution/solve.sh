git init -q
git add recipe.txt
git -c user.name=Ada -c user.email=ada@example.com commit -q -m 'Add the recipe'
