/* Stands in for pyxis, which starts the tasks of a step in a container: takes its options, refuses what it
   refuses, and gives the tasks the variables that they would have in there. An image is a file with a line
   NAME=VALUE for each variable that it sets. These count, unless --container-env names the variable.

   Compiled against Slurm's own header: gcc -shared -fPIC -o pyxis.so pyxis.c */

#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis, 1)

enum { IMAGE, MOUNTS, KEPT, NUM_OPTIONS };
static char *given[NUM_OPTIONS];

/* Mounts are SOURCE:TARGET or SOURCE:TARGET:FLAGS, and the source has to be there. */
static int check_mounts(const char *mounts) {
  char *copy = strdup(mounts), *rest = copy, *mount;
  while ((mount = strsep(&rest, ",")) != NULL) {
    char *colon = strchr(mount, ':');
    if (colon == NULL) {
      slurm_error("pyxis: invalid mount %s", mount);
      return -1;
    }
    *colon = 0;
    if (access(mount, F_OK) != 0) {
      slurm_error("pyxis: no %s to mount", mount);
      return -1;
    }
  }
  free(copy);
  return 0;
}

static int take(int option, const char *value, int remote) {
  given[option] = strdup(value);
  return option == MOUNTS && !remote ? check_mounts(value) : 0;
}

int slurm_spank_init(spank_t spank, int argc, char **argv) {
  char *names[] = {"container-image", "container-mounts", "container-env"};
  for (int option = 0; option < NUM_OPTIONS; option++) {
    struct spank_option known = {names[option], "VALUE", "[pyxis] a container", 1, option, take};
    if (spank_option_register(spank, &known) != ESPANK_SUCCESS) return -1;
  }
  return 0;
}

static int is_kept(const char *name) {
  char *copy = strdup(given[KEPT] ? given[KEPT] : ""), *rest = copy, *kept;
  int found = 0;
  while ((kept = strsep(&rest, ",")) != NULL) found |= strcmp(kept, name) == 0;
  free(copy);
  return found;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
  char line[4096];
  if (given[IMAGE] == NULL) return 0;
  FILE *image = fopen(given[IMAGE], "r");
  if (image == NULL) {
    slurm_error("pyxis: no image %s", given[IMAGE]);
    return -1;
  }
  while (fgets(line, sizeof line, image) != NULL) {
    line[strcspn(line, "\n")] = 0;
    char *value = strchr(line, '=');
    *value++ = 0;
    if (!is_kept(line)) spank_setenv(spank, line, value, 1);
  }
  fclose(image);
  return 0;
}
