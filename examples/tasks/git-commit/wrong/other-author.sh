git init -q
git add recipe.txt
git -c user.name=Agent -c user.email=agent@example.com commit -q -m 'Add the recipe'
