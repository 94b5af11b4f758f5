"""The list of mutants fits the code; running it takes minutes, see there."""

from absl.testing import absltest

from tests import mutants


class MutantsTest(absltest.TestCase):

  def test_all_can_be_applied(self):
    self.assertLen(set(mutants.MUTANTS), 124)
    for mutant in mutants.MUTANTS:
      self.assertNotEqual(mutant.old, mutant.new)
      mutants.applied(mutant)
      self.assertTrue((mutants.ROOT / mutant.test).is_file(), mutant.test)


if __name__ == '__main__':
  absltest.main()
