"""Names of operands in PTX."""

from absl.testing import absltest

from tests.testing import abstract_gpu

if abstract_gpu.RUNS:
  from pallas_kernels.mosaic import ptx


class NumberedTest(absltest.TestCase):

  # Before jax 0.11 there are no kernels.
  __test__ = abstract_gpu.RUNS

  def test_names_become_positions(self):
    code = '{ mov.u32 t, %tid.x; L%%: add.u32 %sum, %x, %x1; @p bra L%%; }'
    self.assertEqual(
        ptx._numbered(code, ('sum', 'x', 'x1')),
        '{ mov.u32 t, %tid.x; L${:uid}: add.u32 $0, $1, $2; @p bra L${:uid}; }',
    )

  def test_unknown_name(self):
    with self.assertRaisesRegex(ValueError, r"%y must be one of \('x',\)"):
      ptx._numbered('mov.b32 %x, %y;', ('x',))


if __name__ == '__main__':
  absltest.main()
